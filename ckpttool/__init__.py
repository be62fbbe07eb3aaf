"""ckpttool"""
